"""Why a job does not go on: where every rank stands, who waits for whom, and who began it."""
