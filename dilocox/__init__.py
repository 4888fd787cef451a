"""dilocox trains one language model on several GPU clusters that are joined only by a slow network."""

__version__ = "0.1.0"
