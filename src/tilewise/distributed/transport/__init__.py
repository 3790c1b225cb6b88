"""Memory that ranks share: barriers, copies, and what they say when one fails."""
