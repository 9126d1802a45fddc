"""A round in one line of the log."""

from fl_admm_strategies.runtime.progress import in_short


def test_a_round_is_short_and_rounded() -> None:
    metrics = {
        "train-loss": 1.23456789,
        "loss": 2.0,
        "personal-loss": 0.5,
        "personal-accuracy": 0.91666666,
        "global-loss": 3.123456e-7,
        "stationarity": float("nan"),
    }
    # Of the personal models more is known than their loss, of the global one it is not.
    assert in_short(metrics) == (
        "train-loss 1.235, loss 2, personal-accuracy 0.9167, global-loss 3.123e-07, "
        "stationarity nan"
    )
    assert in_short({}) == ""
