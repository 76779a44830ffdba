"""Starting, resuming and stopping a job: its folder, launcher and settings of one run."""
