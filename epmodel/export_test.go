package epmodel

// Size returns the length of the file in bytes.
func (s *Splice) Size() int64 { return s.size }
