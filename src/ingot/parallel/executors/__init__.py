"""What a trainer needs of a model in one process or in many: one interface, two implementations."""
