package jobs

import "context"

// Inquire runs find for the key, once however many ask at that time, to find out something before a request can be
// planned: which devices execution providers list, or what they make of one node. The first time that may take long, so
// users see it among the jobs, and may give it up. It goes on when those who asked have left, because the result serves
// the next caller. ep is the execution provider that it is about.
func (js *Jobs) Inquire(ctx context.Context, key string, who Caller, ep string, find func(context.Context) (any, error)) (any, error) {
	who.GoOn, who.Since = true, js.Now()
	about := About{Inquiry: true, Info: Info{ModelName: who.Name, EP: ep, UID: who.UID,
		Why: "asked for: what its execution provider does here is found out first"}}
	result, _, err := js.Join(ctx, Key{Alone: key}, who, func() (Work, error) {
		return Func{about, func(ctx context.Context, j *Job) (*Result, error) {
			j.Run("probing")
			fact, err := find(ctx)
			return &Result{Fact: fact}, err
		}}, nil
	})
	if err != nil {
		return nil, err
	}
	return result.Fact, nil
}
