package unixsock

import (
	"os"
	"path/filepath"
)

// SystemSocket is where the machine's daemon listens.
const SystemSocket = "/run/epcached/epcached.sock"

// SocketVariable names the environment variable that says which daemon to use.
const SocketVariable = "EPCACHE_SOCKET"

// DefaultSocket lists where a client looks for a daemon, in order: the user's own, then the system's. Where
// EPCACHE_SOCKET is set it alone is meant: an application that was pointed at one daemon must not end up at another.
func DefaultSocket() []string {
	if path := os.Getenv(SocketVariable); path != "" {
		return []string{path}
	}
	var paths []string
	if own := UserSocket(); own != "" {
		paths = append(paths, own)
	}
	return append(paths, SystemSocket)
}

// UserSocket is where the user's own daemon listens: in the runtime folder, else in the state folder; empty if the
// user has neither.
func UserSocket() string {
	if dir := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "epcached", "epcached.sock")
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "epcached", "epcached.sock")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return ""
	}
	return filepath.Join(home, ".local", "state", "epcached", "epcached.sock")
}
