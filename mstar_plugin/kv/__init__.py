"""The paged KV resource: declarations, retention, pages, plan and manager."""
