package compilers

// DropCgroups lets a compiler's workers have none, as on a system that gives it none. It tells whether there were any.
func (o *ORT) DropCgroups() bool {
	had := o.host.groups != nil
	o.host.groups = nil
	return had
}
