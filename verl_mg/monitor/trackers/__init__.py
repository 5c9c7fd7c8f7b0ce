"""Where the metrics of each iteration go: files, TensorBoard, the console, and the services of others."""

from verl_mg.monitor.trackers.console import ConsoleTracker
from verl_mg.monitor.trackers.files import EvaluationTable, JsonlTracker
from verl_mg.monitor.trackers.retrying_tracker import RetryingTracker
from verl_mg.monitor.trackers.services import check_services
from verl_mg.monitor.trackers.tensorboard import TensorBoardTracker
from verl_mg.monitor.trackers.tracker import Tracker

__all__ = [
    "ConsoleTracker",
    "EvaluationTable",
    "JsonlTracker",
    "RetryingTracker",
    "TensorBoardTracker",
    "Tracker",
    "check_services",
]
