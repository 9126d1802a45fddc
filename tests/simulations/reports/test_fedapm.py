"""FedAPM in the app: its experiments, on digits."""

from simulations.experiments.loading import load_settings


def test_the_experiments_are_the_papers() -> None:
    for name, clients in (("fedapm-cifar10", 20), ("fedapm-har", None)):
        settings = load_settings(name, profile="paper")
        assert settings.training.fraction_train == 0.3
        assert settings.algorithm.rho == 0.01 * (clients or 30)  # type: ignore[attr-defined]
        assert settings.algorithm.local_epochs == 3  # type: ignore[attr-defined]
        assert settings.data.options.get("clients") == clients
        # HAR stands in for KU-HAR, beside which the published numbers do not stand.
        assert ("FedAPM" in settings.published) == (name == "fedapm-cifar10")
        load_settings(name, profile="quick")
