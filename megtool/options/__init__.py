"""Options of the verbs, each declared once: flags, YAML keys, keywords, help and checks."""
