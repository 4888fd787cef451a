"""From a small description of a site to its job scripts. No torch."""
