"""Engines' start-up logs, read and compared with the prediction."""

from lessonlib.capacity.engine_logs.read import ENGINES, EngineLog, LogRow, Reading, compare_log, read_engine_log

__all__ = ["ENGINES", "EngineLog", "LogRow", "Reading", "compare_log", "read_engine_log"]
