"""Rules on combinations of settings, one module a component; `config_rules.check` runs them all."""
