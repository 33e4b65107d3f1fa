package index

import "fmt"

// maxWanted bounds how many wanted jobs are read.
const maxWanted = 1 << 12

// Wanted gives the jobs that were saved and not dropped, by their ids, as far as they were not lost.
func (x *Index) Wanted() (map[string][]byte, error) {
	rows, err := x.softRows(bucketWanted, maxWanted)
	if err != nil {
		return nil, fmt.Errorf("wanted jobs: %w", err)
	}
	return rows, nil
}

// SaveWanted keeps what a job is that nobody waits for, some 60 KiB at most. When it returns the job outlives this process.
func (x *Index) SaveWanted(id string, value []byte) error {
	err := x.soft.put(bucketWanted, []byte(id), value)
	if err == nil {
		err = x.soft.flush()
	}
	if err != nil {
		return fmt.Errorf("wanted job %s: %w", id, err)
	}
	return nil
}

// DropWanted forgets a job, within seconds: one that comes back then is found to be done.
func (x *Index) DropWanted(id string) { x.soft.drop(bucketWanted, []byte(id)) }
