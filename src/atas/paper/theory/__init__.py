"""The paper's regret bounds, measured on problems that meet its assumptions. No network is trained."""
