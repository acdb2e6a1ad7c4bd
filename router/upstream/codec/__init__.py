"""What is said to servers, and what they say: requests into HTTP, replies into values. Nothing here sends or waits."""
