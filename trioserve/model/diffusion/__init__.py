"""Models that make images in many denoising steps. Components of diffusers compute requests at any steps together."""
