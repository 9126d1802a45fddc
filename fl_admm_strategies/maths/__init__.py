"""The mathematics: functions and small dataclasses on numpy arrays, without Flower or torch."""
