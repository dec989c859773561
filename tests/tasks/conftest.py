"""words_task.py registers a task where it is imported: only its tests may do that."""

collect_ignore = ["words_task.py"]
