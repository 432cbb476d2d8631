"""Find spans in texts with token classifiers or rules, merge them, and redact them."""
