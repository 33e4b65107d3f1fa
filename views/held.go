package views

// Opener is who has a file open.
type Opener int

// Who may have it open.
const (
	ByNobody Opener = iota
	ByDaemon        // and perhaps somebody else
	BySomebody
)

// inode tells files apart.
type inode struct{ dev, ino uint64 }
