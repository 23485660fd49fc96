"""Models that create images in many denoising steps.

One pass of a diffusers network computes a step of several requests, which may be at different steps."""
