"""Where the metrics of each iteration go: files, TensorBoard, the console, and the services of others."""

from verl_mg.job.trackers.console import ConsoleTracker
from verl_mg.job.trackers.files import EvaluationTable, JsonlTracker
from verl_mg.job.trackers.guarded import Guarded
from verl_mg.job.trackers.services import check_services
from verl_mg.job.trackers.tensorboard import TensorBoardTracker
from verl_mg.job.trackers.tracker import Tracker

__all__ = [
    "ConsoleTracker",
    "EvaluationTable",
    "Guarded",
    "JsonlTracker",
    "TensorBoardTracker",
    "Tracker",
    "check_services",
]
