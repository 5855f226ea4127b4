"""One bucket's way: its plan, its stages, its routes over ranks, its averages."""
