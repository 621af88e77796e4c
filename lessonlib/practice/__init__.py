"""Questions, predictions and the learner's progress."""

from lessonlib.practice.predictions import compare, predict

__all__ = ["compare", "predict"]
