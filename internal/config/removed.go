package config

// removed names the fields that earlier versions had, with what each meant and what replaces it.
// They are accepted with a warning, so that the daemon starts after an upgrade.
var removed = map[string]string{
	"space.compress_after": "it said after how long without use a build's own bytes are " +
		"compressed; packing compresses them now, where that saves an eighth",
	"standby_seconds": "it said how long a worker was kept ready after a compile; workers " +
		"start with their compile now",
}

// Warnings returns the fields that have no effect any more, in the order of the file.
func (s *Settings) Warnings() Errors { return s.warnings }
