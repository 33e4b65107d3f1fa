package unixsock

import (
	"os"
	"path/filepath"
)

// SystemSocket is the socket of the machine's daemon.
const SystemSocket = "/run/epcached/epcached.sock"

// SocketVariable names the environment variable that says which daemon to use.
const SocketVariable = "EPCACHE_SOCKET"

// DefaultSocket lists the sockets that a client tries, in order: those of the user's own daemon,
// then the system's. If EPCACHE_SOCKET is set, it is the only one, so that an application that is
// configured for one daemon never uses another.
func DefaultSocket() []string {
	if path := os.Getenv(SocketVariable); path != "" {
		return []string{path}
	}
	var paths []string
	for _, own := range UserSockets() {
		// A socket in another user's directory may belong to any user.
		if info, err := os.Stat(filepath.Dir(own)); err != nil || ownerOf(info) == os.Geteuid() {
			paths = append(paths, own)
		}
	}
	return append(paths, SystemSocket)
}

// UserSockets lists the possible sockets of the user's own daemon: in the runtime directory, then
// in the state directory. A client tries both, because a daemon that was started from a desktop has
// a runtime directory, and a cron job that uses it has none.
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

// UserSocket returns the socket of the user's own daemon: in the runtime directory, otherwise in
// the state directory; "" if the user has neither.
func UserSocket() string {
	return firstOf(UserSockets())
}

// UserState returns the state directory of the user's own daemon, "" for a user without a home.
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
