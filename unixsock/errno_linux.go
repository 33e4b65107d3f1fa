package unixsock

import (
	"errors"
	"slices"
	"syscall"
)

// tooManyInFlight says that the kernel refuses to have more of this user's descriptors under way.
func tooManyInFlight(err error) bool { return errors.Is(err, syscall.ETOOMANYREFS) }

// tryAgain is for errors of accept that pass: the process or the machine is short of descriptors or memory, or the
// client left while it waited.
func tryAgain(err error) bool {
	return isOneOf(err, syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED, syscall.EINTR)
}

// notConnected is for errors of connect that a daemon which is starting, or is busy accepting, takes away.
func notConnected(err error) bool {
	return isOneOf(err, syscall.ENOENT, syscall.ECONNREFUSED, syscall.EAGAIN)
}

func isOneOf(err error, errnos ...error) bool {
	return slices.ContainsFunc(errnos, func(errno error) bool { return errors.Is(err, errno) })
}
