"""Observations with images: the frame stack, the frames in the replay memory, the convolutional encoder."""
