"""Work on long bodies, in processes beside the event loop."""
