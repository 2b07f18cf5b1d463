"""A frozen pair of towers, of images and of texts, and what methods learn beside it."""
