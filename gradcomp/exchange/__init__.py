"""The exchange of one bucket: its plan, stages, routes over ranks, and averages."""
