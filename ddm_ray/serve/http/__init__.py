"""Routes, requests and responses of OpenAI's images API, authentication, and the page. No Ray."""
