"""Noise-free episodes, in this process or in another one, and statistics over seeds."""
