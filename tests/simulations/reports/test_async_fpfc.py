"""AsyncFPFC in the app: the metric by the clock, beside FPFC's."""

from pathlib import Path

import numpy as np
import pytest

from simulations.experiments.experiment import RunConfig
from tests.simulations.quick_runs import result_of, rounds_of, run
from tests.support.refusals import names

TINY = (
    "data.options={ clients = 3 }",
    "training.num-rounds=12",
    "training.evaluate-every=3",
    "algorithm.local-epochs=1",
)


@pytest.mark.slow
def test_the_report_has_fpfc_on_the_same_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = (*TINY, "report.active=[3]", "algorithm.delay=10.0")
    folder = run(RunConfig("async-digits", changes=changes, out=tmp_path / "run"))
    result = result_of(folder)
    # Three clients that all take 10 s: three replies, and a round of all three, every 10 s.
    assert result["seconds_of_the_clock"] == 40.0
    own_file, fpfc = result["by_the_clock"]["asyncFPFC"], result["by_the_clock"]["FPFC, 3 a round"]
    assert [time for time, _ in own_file] == [time for time, _ in fpfc] == [10.0, 20.0, 30.0, 40.0]
    headline = 100 * result["models"]["personal model"]["mean"]
    assert own_file[-1][1] == pytest.approx(headline)
    assert np.isfinite([value for _, value in fpfc]).all()
    assert list(result["staleness"].values()) == [0, 1, 2] + 9 * [2]
    shown = " ".join(capsys.readouterr().out.split())
    assert names(shown, "1.8 replies", "2 at most")
    assert (folder / "time.png").exists()
    # omega_i travels with zeta_i: 650 numbers up and twice as many down.
    traffic = [line["traffic"] for line in rounds_of(folder)]
    assert result["cost"] == sum(map(sum, traffic)) // 4
    assert sum(up for _, up in traffic) == 12 * 650 * 4
    assert sum(down for down, _ in traffic) == (12 + 2) * 2 * 650 * 4
