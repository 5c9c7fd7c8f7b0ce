"""Weight sync: transfers of the actor's weights into engines, in the job and outside of it."""
