"""Running a model in one process or in many: one interface, two implementations."""
