"""Random faults in whole training jobs, and a verdict on what they did. Nothing imports this room."""
