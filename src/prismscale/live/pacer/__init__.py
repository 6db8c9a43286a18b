"""The process that holds back a live rank's GPU until its communications end."""
