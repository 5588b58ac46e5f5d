"""The image of a rank on its way: frames, the sender on the source, the store and the lane on the target."""
