"""One thin entry a DVC stage: read params and files, call pipeline, write one JSON."""
