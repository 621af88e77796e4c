"""Questions, predictions and the learner's progress."""

from lessonlib.practice.checker import Feedback, check
from lessonlib.practice.exercises import check_task
from lessonlib.practice.predictions import compare, predict
from lessonlib.practice.questions import QUESTIONS
from lessonlib.practice.widgets import calibration, practice_widget

__all__ = ["QUESTIONS", "Feedback", "calibration", "check", "check_task", "compare", "practice_widget", "predict"]
