"""Methods: found by name, their settings derived from their constructors, built and run."""

from .federation import Federation as Federation
from .federation import ScoreHistory as ScoreHistory
from .federation import run_here as run_here
from .federation import run_method as run_method
from .tables import METHODS as METHODS
from .tables import baseline_table as baseline_table
from .tables import client_of as client_of
from .tables import completed as completed
from .tables import strategy_named as strategy_named
