package unixsock

import (
	"os"
	"path/filepath"
)

// SystemSocket is where the machine's daemon listens.
const SystemSocket = "/run/epcached/epcached.sock"

// SocketVariable names the environment variable that says which daemon to use.
const SocketVariable = "EPCACHE_SOCKET"

// DefaultSocket lists where a client looks for a daemon, in order: the user's own, then the
// system's. Where EPCACHE_SOCKET is set it alone is meant: an application that was pointed at one
// daemon must not end up at another.
func DefaultSocket() []string {
	if path := os.Getenv(SocketVariable); path != "" {
		return []string{path}
	}
	var paths []string
	for _, own := range UserSockets() {
		// A socket in another user's directory may be of any user.
		if info, err := os.Stat(filepath.Dir(own)); err != nil || ownerOf(info) == os.Geteuid() {
			paths = append(paths, own)
		}
	}
	return append(paths, SystemSocket)
}

// UserSockets lists where the user's own daemon may listen: in the runtime directory, then in the
// state directory. A client looks at both, for a daemon that was started from a desktop has a
// runtime directory, and a job of cron that asks it has none.
func UserSockets() []string {
	var paths []string
	if dir := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		paths = append(paths, filepath.Join(dir, "epcached", socketName))
	}
	if dir := UserState(); dir != "" {
		paths = append(paths, filepath.Join(dir, socketName))
	}
	return paths
}

const socketName = "epcached.sock"

// UserSocket is where the user's own daemon listens: in the runtime directory, else in the state
// directory; empty if the user has neither.
func UserSocket() string {
	return firstOf(UserSockets())
}

// UserState is the state directory of the user's own daemon; empty for a user without a home.
func UserState() string {
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "epcached")
	}
	home, err := os.UserHomeDir()
	if err != nil || !filepath.IsAbs(home) {
		return ""
	}
	return filepath.Join(home, ".local", "state", "epcached")
}
