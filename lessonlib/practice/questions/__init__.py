"""The eight practice questions."""

from lessonlib.practice.questions.all import (
    LARGEST_TOLERANCE,
    QUESTIONS,
    Mistake,
    Part,
    get_part,
    get_question,
    kv_mistakes,
    show_answer,
)

__all__ = [
    "LARGEST_TOLERANCE",
    "QUESTIONS",
    "Mistake",
    "Part",
    "get_part",
    "get_question",
    "kv_mistakes",
    "show_answer",
]
