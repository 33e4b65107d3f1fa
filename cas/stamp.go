package cas

// Stamp is what lets us believe that a file is still the one we looked at.
// Two stamps are compared with ==; see also Stamp.Trusted.
type Stamp struct {
	Dev, Ino     uint64
	Size         int64  // bytes
	Mtime, Ctime int64  // nanoseconds since 1970
	Boot         string // "" when the file was synced, else the boot it dies with
}
