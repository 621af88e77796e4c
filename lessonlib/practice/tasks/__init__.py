"""The coding tasks, one module a lesson."""

from lessonlib.practice.tasks import lesson_1, lesson_2, lesson_3, lesson_4, lesson_5
from lessonlib.practice.tasks.task import Task

TASKS: dict[str, Task] = {
    task.id: task for module in (lesson_1, lesson_2, lesson_3, lesson_4, lesson_5) for task in module.TASKS
}
