"""The search for a plan: propose, compile, judge."""
