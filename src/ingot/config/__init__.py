"""What a run is: schema machinery, time strings, YAML files, overrides, recipes."""
