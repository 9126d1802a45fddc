"""The federation that the tests of deployments share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.deployment import PLAIN, Federation, is_service


@pytest.fixture(scope="session")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """The federation of 'Three sites on one machine', started as the guide says."""
    federation = Federation(tmp_path_factory.mktemp("plain") / "app")
    try:
        for block in PLAIN[:-1]:
            if not is_service(block):
                federation.run(block)
        federation.start_all([block for block in PLAIN if is_service(block)])
        federation.wait_for_sites("sites", 3)
        yield federation
    finally:
        federation.stop()


@pytest.fixture
def shown(sites: Federation) -> Iterator[Federation]:
    """The federation; what its processes wrote during the test is shown if it fails."""
    sizes = {log: log.stat().st_size for log in sites.folder.parent.glob("*.log")}
    yield sites
    for log in sorted(sites.folder.parent.glob("*.log")):
        print(f"--- {log.name}\n{log.read_text(errors='replace')[sizes.get(log, 0) :]}")
