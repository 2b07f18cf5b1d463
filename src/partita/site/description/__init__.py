"""What a site tells about its data before training, protected, and what the descriptions of several sites say."""
