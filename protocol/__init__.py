"""What coordinator and nodes must agree on: numerics, messages, plan and ledger. Imports nothing of ours."""
