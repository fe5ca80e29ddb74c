"""Score given structures by a network: AF2Rank's protocol, and initial guesses for designs."""
